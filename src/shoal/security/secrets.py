"""Secrets in text. The implementation lives below the configuration, whose reprs and messages need it too."""

from shoal.config.masking import mask_url

__all__ = ["mask_url"]
