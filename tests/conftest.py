"""Makes the modules beside this file importable from every suite: tiny, graph_writing, meaning, random_graphs, …"""
