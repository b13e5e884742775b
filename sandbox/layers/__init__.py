"""An MLA layer and its parts."""
