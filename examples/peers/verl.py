"""A reward function as verl's `custom_reward_function` names one: one response in, a dict with `score` out."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The number behind the last `=` against the truth, within the tolerance that the row's `extra_info` has."""
    tolerance = (extra_info or {}).get("tolerance", 0.0)
    text = solution_str.rpartition("=")[2].strip()
    try:
        right = abs(float(text) - float(ground_truth)) <= tolerance
    except ValueError:
        right = False
    worth = 2.0 if data_source == "hard" else 1.0
    return {"score": worth * right, "acc": right, "pred": text}
