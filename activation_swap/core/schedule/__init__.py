# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: when each chunk, (stage, microbatch), moves, and what that saves.

Its files in the order in which to read them, and what each holds:

A plan
    actions: one action, one step, and their text form
    arguments: what the pipeline functions take
    orders: what a rank computes under GPipe and 1F1B
    liveness: when each chunk is written, first needed and last needed
    simulation: how many groups are on the device, step by step
    decision: which chunks are worth moving
    lowering: the plan: a compute order with its swap actions
    validation: the rules of a plan
    grid: a plan, printed

Its execution
    runner: calls the verbs around each compute call, as planned
    torch_orders: what a rank computes under a schedule of torch
    torch_pipelining: follows a schedule of torch
"""
