"""Tests against LMCache itself. Without it they fail: `make test-peers` installs it."""

import os
import warnings

# Before LMCache is imported: it reports its use to a host outside otherwise, and logs each probe.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "CRITICAL"

with warnings.catch_warnings():
    # What LMCache and torch use that is deprecated is not for us to mend. All that the tests use is imported here.
    warnings.simplefilter("ignore")
    import lmcache
    import lmcache.v1.multiprocess.modules.blend.module
    import lmcache.v1.multiprocess.transfer_context
    import lmcache.v1.multiprocess.transport.zmq_impl
    import torch  # noqa: F401

TESTED_VERSION = "0.5.6"
found = lmcache.__version__
assert found == TESTED_VERSION, f"these tests describe lmcache {TESTED_VERSION}, not {found}"


def pytest_configure(config):
    # LMCache's, from modules that it imports when they are used.
    config.addinivalue_line("filterwarnings", "ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")
