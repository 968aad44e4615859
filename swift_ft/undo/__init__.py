"""Undoing an optimizer's step (§4, Appendix A): rules, snapshots, residuals. No I/O, no threads."""
