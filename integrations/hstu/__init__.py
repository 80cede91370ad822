"""HSTU (arXiv 2402.17152): the sequence model, its baseline SASRec, their data schema, weights and size calculator."""
