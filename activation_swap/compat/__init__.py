# SPDX-License-Identifier: Apache-2.0
"""What the package knows of torch and Transformers releases, checked on the live model.

The modules of this folder that do not look at a model import neither torch nor transformers.
"""
