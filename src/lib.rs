//! Feed a reinforcement-learning learner from a CUDA page-locked ring that environment threads write in place.
