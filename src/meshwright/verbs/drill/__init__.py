"""`meshwright drill`: break a short run on purpose, in many ways, and see that it goes on by itself."""
