# SPDX-License-Identifier: Apache-2.0
"""Swaps what attentions save for backward. It knows torch, and no model.

Its files in the order in which to read them, and what each holds:

Where a swap attaches
    swap_plan: the sites, the set-up and the policy that the registry has checked
    hooked_site: a site as its hooks know it, its modules weakly
    install: a plan put on a model, and taken off
    hooks: what runs before and after each attention; inert in a copy of the model
    attention_calls: a recorder opened around each training call
    call_guard: what such a call is refused for

What autograd saves
    recorder: the pack hook: which saved tensors may move, one storage each
    narrowing: fp32 that is an upcast of bf16, and travels as bf16
    wrapped_tensor: a DTensor or its like, taken apart
    saved_storage: one storage, on the device or on the host
    packed_tensor: what autograd holds in place of a tensor; unpacks it

What moves, and when
    group: the storages of one attention call, and their state
    order: the protocol of what decides when groups move
    layer_chain: without a pipeline: by the layers
    chunks: under a pipeline: by a scheduler's verbs
    nothing_moved: the warning of both when nothing did
    engine: the steps of a group from its offload to its backward
    counters: what the engine counts

How bytes travel
    link: a device's transfer and pool
    transfer: the protocol of copies, their fences
    host_transfer: that of a CPU
    accelerator_transfer: that of an accelerator, by streams and events
    pinned_pool: host memory in slabs
    host_memory: how much of it this process may take

By which schedule
    schedule: what a pipeline's rank computes, and the plan of what moves

What all use
    warning: warnings that name a line of the training code
    torch_private: every private name of torch but pipelining's, in one place
"""
