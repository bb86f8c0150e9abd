"""State that a run resumes from, and first weights from a folder."""
