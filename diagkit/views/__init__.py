"""Pictures of where tensors live: each answers one question, and says the same in words and on a page without a kernel."""
