"""What verl 0.9.1 registers, and the flags that compute the same here."""

ESTIMATORS_OF_VERL = {
    "gae": "--advantage-estimator ppo --normalize-advantages",
    "gdpo": "--advantage-estimator gdpo --normalize-advantages",
    "gpg": "--advantage-estimator gpg --gpg-scale rewards",
    "grpo": "--advantage-estimator grpo",
    "grpo_passk": "--advantage-estimator passk_best --passk-best-std",
    "grpo_vectorized": "--advantage-estimator grpo",
    "opo": "--advantage-estimator opo",
    "optimal_token_baseline": "--advantage-estimator optimal_token_baseline --otb-zero-tail",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
    "remax": "--advantage-estimator remax",
    "rloo": "--advantage-estimator rloo",
    "rloo_vectorized": "--advantage-estimator rloo",
    "tir_optimal_token_baseline": "--advantage-estimator optimal_token_baseline --otb-zero-tail",
}
POLICY_LOSSES_OF_VERL = {
    "bypass_mode": "--use-rollout-logprobs --policy-loss ppo --eps-clip-c 3",
    "cispo": "--policy-loss cispo --ratio-max 1.2 --ratio-min 0.8",
    "clip_cov": "--policy-loss clip_cov",
    "dppo_kl": "--policy-loss dppo_kl --dppo-kl-delta 0.2 --dppo-ratio-max 20",
    "dppo_tv": "--policy-loss dppo_tv --dppo-tv-delta 0.2 --dppo-ratio-max 20",
    "dro": "--policy-loss dro --dro-level token",
    "geo_mean": "--policy-loss geo_mean --geo-mean-log-clip 0.2",
    "gpg": "--policy-loss gpg",
    "gspo": "--policy-loss gspo",
    "kl_cov": "--policy-loss kl_cov",
    "sapo": "--policy-loss sapo",
    "vanilla": "--policy-loss ppo --eps-clip-c 3",
}
