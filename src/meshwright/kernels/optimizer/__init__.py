"""Updates of many tensors: AdamW in every precision, and Newton-Schulz for Muon."""
