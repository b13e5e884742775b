"""The MLA layer and what it is made of: tables of RoPE, models' configs."""
