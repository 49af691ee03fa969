"""The backends that come with core: `local` (processes of one host)."""
