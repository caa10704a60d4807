"""The index: it finds the rows nearest to a query without reading all rows.

FAISS groups the vectors of each segment into lists, and stores an 8-bit code of every vector. A
search reads only the lists whose mean is nearest to the query. The nearest rows are then read in
full, so their scores are exact.

- `metric.py`: which scores an index can serve
- `segment_index.py`: the index of one segment: build, check and search it
- `row_index.py`: the search over all rows of a version
- `calibration.py`: the recall and the missing weight, measured on held-out queries
- `best_rows.py`: answers with the k best rows that the index finds
- `approximate.py`: `ask` and `attend` over the rows that the index finds

An index is derived data. It is never needed for a correct answer: rows without one are scanned.
"""
