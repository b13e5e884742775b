"""The MLA layer and its parts."""
