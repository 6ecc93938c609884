"""HTTP as clients of Headrace use it."""
