"""What knows LMCache. Nothing outside this package does.

Importing it imports neither LMCache nor torch.
"""

from kvsplice.lmcache.matcher import TokenRangeMatcher
from kvsplice.lmcache.server_module import build_server_modules

__all__ = ["TokenRangeMatcher", "build_server_modules"]
