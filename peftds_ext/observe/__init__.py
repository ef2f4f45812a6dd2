# SPDX-License-Identifier: Apache-2.0
"""What a run did and how long it took: statistics, a report that a user reads, and a trace."""
