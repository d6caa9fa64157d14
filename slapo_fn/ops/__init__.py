"""One file a primitive. Nothing is re-exported here: a function would hide the module of the same name."""
