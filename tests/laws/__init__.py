"""The laws of `apply`, over a table of all primitives (`table`) and a table of hard models (`models`)."""
