# SPDX-License-Identifier: Apache-2.0
"""What we compare with: torch, stock DeepSpeed, and the memory itself."""
