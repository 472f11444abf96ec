"""What knows LMCache. Nothing outside this package does.

Importing it imports neither LMCache nor torch.
"""

from kvsplice.lmcache.matcher import TokenRangeMatcher

__all__ = ["TokenRangeMatcher"]
