"""Records jobs whose code says nothing of diagkit: by ``diagkit run``, or by an environment variable alone.

Nothing here imports torch before the job does.
"""
