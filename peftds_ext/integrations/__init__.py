# SPDX-License-Identifier: Apache-2.0
"""The only importers of DeepSpeed, Transformers, PEFT and Accelerate."""
