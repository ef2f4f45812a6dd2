# SPDX-License-Identifier: Apache-2.0
"""Which weights are needed when, and which of them stay: for any torch module, without DeepSpeed."""
