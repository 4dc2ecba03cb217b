# SPDX-License-Identifier: Apache-2.0
"""``python -m activation_swap.compat``: whether the installed Transformers is supported."""

from __future__ import annotations

import sys

from activation_swap.compat.canary import main

sys.exit(main())
