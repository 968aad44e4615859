"""Taking back an optimizer's step (§4, Appendix A): rules, journals, residuals. No I/O, no threads."""
