"""Trains the bundled target and its EAGLE-3 drafter on the running interpreter's standard library.

Stages (``spec-kernels train --stage ...``): corpus, target, generate, drafter, export.
"""
