# SPDX-License-Identifier: Apache-2.0
"""Measurements of step time and memory, each with its machine, versions, command and spread.

``python -m benchmarks --list`` names the runs, ``run`` measures, ``render`` makes the pages.
"""
