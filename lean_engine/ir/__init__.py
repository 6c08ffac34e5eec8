"""The op graph: values (graph), what each op is (ops) and means (reference), the rules (verify), its text (text)."""
