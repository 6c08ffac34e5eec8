"""Makes the modules beside this file importable from every suite: tiny, graph_writing, meaning, random_graphs, …

The tests want no GPU, and what they expect of device "auto" is the CPU; the dev extra brings CuPy.
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
