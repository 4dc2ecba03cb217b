# SPDX-License-Identifier: Apache-2.0
"""A small decoder, as a stand-in for a model family that activation_swap does not know."""
