"""The implementation. Public names are re-exported by the modules one level up; docs/architecture.md is the map."""
