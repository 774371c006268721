"""The code of users that flags name: how it is imported and called, and what becomes of its errors."""
