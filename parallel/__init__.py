"""Who owns which rows: context-parallel, decode-context and tensor-parallel arithmetic."""
