# SPDX-License-Identifier: Apache-2.0
"""Optimizers over the fused kernels; usable with plain torch."""
