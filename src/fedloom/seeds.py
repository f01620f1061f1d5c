"""Every random draw of a run, named by what it is for.

A stream depends on the seed and its purpose alone, never on what was drawn before, so results are the same on every
engine and in any order, and one more draw in one place changes nothing elsewhere.
"""

import hashlib

import numpy as np

# The purposes. Their strings enter every draw and so every result: a constant may be renamed, its string may not.
PLAN = "plan"  # batch order, augmentation and dropout of one task on one device
INITIAL_WEIGHTS = "initial weights"  # a model's first weights
COHORT = "cohort"  # the devices of a round
POISSON_COHORT = "poisson cohort"  # the same, where each device is drawn by itself
TIER = "tier"  # a device's tier, where tiers are redrawn every round
HOLDOUT_DEVICES = "unseen"  # devices that are evaluated but never train
SERVER = "server"  # whatever the server draws in a round; a second purpose follows
PUBLIC_BATCH = "probe"  # server: its public examples of a round
FEATURE_PAIRS = "pairs"  # server and device: which features FedIN exchanges
SUBNET_OF_DEVICE = "architecture of "  # server: E-FedSup's subnet of a device, whose name follows
SAMPLED_WINDOW = "sampled window"  # FedRolex: where the window of a tier begins in a round, or its channels
SERVER_ORDER = "server"  # server: the seed of its training, in FedGKT, FedGH and FedTGP
SERVER_BATCHES = "server batches"  # their batches on the server
SUBNET = "subnet"  # FedSup's and FjORD's subnet of a step
SEARCH_SPACE_CHECK = "space"  # subnets on which a search space is tried out
SUBNET_SEARCH = "subnets"  # subnets that `fedloom subnet` evaluates
SUBNET_SEARCH_IN_BUDGET = "subnets within a budget"  # further ones, within a budget
SUBNET_EXAMPLES = "subnet examples"  # test examples that they are evaluated on
PARTITION = "partition"  # which examples a device holds
MAX_EXAMPLES = "most examples"  # which of them it keeps under `data.max_examples`
SUBSAMPLE = "thinned"  # which devices, and which of their examples, `data.subsample` keeps
TIER_LABEL_CORRELATION = "tier label tie"  # which tiers hold which labels under `data.tier_label_correlation`
PUBLIC = "public"  # examples that the server has and no device
VALIDATION = "validation"  # training examples that stand in for the test set
MASKED_TEST_TOKENS = "hidden test words"  # test tokens that a language model has to guess
UCIHAR_TEST = "ucihar tests"  # windows of every person that are tests
POOLED_TEST = "pooled tests"  # examples of a pooled training and test set that are tests
CANVASES = "canvases"  # where the digits of digits-segmentation and digits-multilabel are
SENTIMENT140_TEST = "sentiment140 tests"  # users whose tweets are tests
SHUFFLED_TEST = "shuffled test"  # order of the test set, for models that mix the examples of a batch
SHUFFLED_LOCAL_TEST = "shuffled local test"  # order of a device's own test examples, for such models
SPEED = "pace"  # how much faster or slower than its tier a device is
DROPOUT = "dropout"  # devices whose replies are lost in a round
CORRUPT = "corrupt"  # devices whose replies are always corrupted
CORRUPTION = "damage"  # how a reply is corrupted
MALICIOUS = "malicious"  # devices that attack
ATTACK = "attack"  # what attackers draw in one request
DP_NOISE = "privacy"  # noise of differential privacy, per round and tensor
PROFILING_DATA = "made-up data"  # examples on which a round is timed before there is data

# Streams of tasks: the purpose that follows PLAN. Tasks of one stream that are asked in the same round still draw
# differently, by the index of the request.
TRAIN = "train"  # every method's local training
DESCRIBE = "describe"  # FedHeNN's kernels
TEACH = "teach"  # training on the server, in FedGKT, FedGH and FedTGP
FIT_HEAD = "fit_head"  # FedRep's heads after the last round
EVALUATE = "measure"  # evaluation on devices
FINE_TUNE = "tune"  # fine-tuning before evaluation
COLLECT_STATISTICS = "collect"  # statistics of static batch norm
SCORE = "score"  # test-set evaluation by workers
PREDICT = "answer"  # the same, logits of every exit


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """The random stream for one purpose.

    Parameters
    ----------
    seed : the seed of the run.
    purpose : what is drawn: names and numbers. Two purposes draw independently.

    Examples
    --------
    >>> generator(0, COHORT, round_number).permutation(100)
    """
    return np.random.Generator(np.random.Philox(key=number(seed, *purpose, bits=128)))


def number(seed: int, *purpose: str | int, bits: int = 63) -> int:
    """One number for one purpose, where a library takes a seed of its own.

    Parameters
    ----------
    seed : the seed of the run.
    purpose : what is drawn: names and numbers.
    bits : the number is below 2 to the power of this.
    """
    words = [part if isinstance(part, str) else int(part) for part in (seed, *purpose)]  # numpy spells its numbers
    digest = hashlib.sha256(repr(tuple(words)).encode()).digest()
    return int.from_bytes(digest) >> (256 - bits)
