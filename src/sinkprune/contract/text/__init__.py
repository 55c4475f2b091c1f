"""Tokenizer files and questions, checked before a library reads them."""
