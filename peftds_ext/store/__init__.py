# SPDX-License-Identifier: Apache-2.0
"""Where parameters live while they are not in use: swap folders, their manifests, and how to verify them."""
