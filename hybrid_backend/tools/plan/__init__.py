"""`hybrid plan`: what fits where, before anything is started (docs/plan.md)."""
