"""``laprox-sglang eval``: which policy keeps a model's answers, at which budget.

    command         flags -> items and variants; writes tables, CSV and pictures
    tasks/          generated items (one function each); benchmarks.py reads LongBench's and InfiniteBench's files
    items           an item's conversation, with a mark where the document ends
    variants        a policy at a budget
    run             the loop over what the store does not have yet
    engine          one sgl.Engine; in_scheduler/ is its other half, inside the scheduler process
    metrics         how answers are judged
    store, report, plots

Question-aware runs compress the conversation up to the answer, so the window sees the question; question-agnostic ones
compress the document alone, as a shared prefix is. In both the answer, its first token included, is computed on the
compressed cache: the last token before it is never part of the copy. A ratio counts window and sinks.

Where does my task go: a function in ``tasks/``, a line in ``tasks.TASKS`` and in ``command.TASK_NAMES``. Where does my
figure go: measured in ``in_scheduler.session``, a line in ``report.FIGURES``.
"""
