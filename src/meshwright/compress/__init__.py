"""Smaller models: what is made of a trained one.

distill_student      a student of some of its teacher's layers
distill_sequences    a file of what a teacher answers
"""
