"""One foreign system a folder, each imported only when a table's import string asks for it."""
