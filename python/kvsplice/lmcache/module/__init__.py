"""Mode ``module``: our engine as a module of LMCache's server, over LMCache's storage, sessions and paged caches.

Only what is imported from here needs LMCache, and only in its server. Tested with the version in
`kvsplice.lmcache.module.factory`.
"""
