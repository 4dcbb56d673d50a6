"""What runs inside the sandboxed processes: standard library only, since they start without site-packages."""
