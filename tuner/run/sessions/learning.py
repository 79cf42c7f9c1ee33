"""What a run learns of its engine, and the profile of it that the run keeps as it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import OF_THE_ENGINE, Caveat, ShadowError, TooFewSamplesError
from tuner.replay.process import EngineStart
from tuner.run.calibrate.calibrator import Calibrator
from tuner.run.context import RunContext, Workload
from tuner.run.directory import PROFILE_FILE, STEPS_FILE
from tuner.run.records import Restlessness
from tuner.run.rounds import packed
from tuner.run.time_plan import Observe
from tuner.run.trial_runner import TrialRunner
from tuner.search.judging import TIE_LOSS
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.shadow.agreement import compare, together
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import (
    Agreement,
    Profile,
    drafts_words,
    read_profile,
    write_profile,
)
from tuner.shadow.reference import REPLAY_S, replay_reference
from tuner.traffic.windows import busiest

# By what share of a step's tokens the drafts of a race and of a profile may differ: ours, as
# much as two settings that are worth a change.
APART = 0.05
# Stretched steps that make all of them longer by more than this are told: ours, as much as what
# two live replays of one setting differ by on a quiet machine and more.
STRETCHED = 0.05
# How much traffic the simulator is compared with vLLM's scheduler on, in seconds: ours, more
# than can be asked about in the time.
COMPARED_S = 600.0


@dataclass(slots=True)
class Learning:
    """What a run learns of its engine; its profile lies in the run's directory.

    `calibrator` has the steps that were seen, None until an engine is there to learn of.
    """

    runner: TrialRunner
    serve_values: Mapping[str, object]
    predictor_of: Callable[[Profile], Predictor]
    calibrator: Calibrator | None = None

    @property
    def context(self) -> RunContext:
        """What the run was given."""
        return self.runner.context

    @property
    def begun(self) -> Calibrator:
        """What has the steps that were seen. Raises: ShadowError before `begin`."""
        if self.calibrator is None:
            raise ShadowError("nothing was learnt of an engine")
        return self.calibrator

    def begin(self, started: EngineStart, stored: Profile | None = None) -> Calibrator:
        """Begin to learn of an engine, whose starts a profile of before may know.

        Raises: ShadowError if nothing can be predicted of such an engine.
        """
        current = self.context.space.current
        begun = Calibrator.of(started, current, self.serve_values, stored)
        self.calibrator = replace(begun, keep=self._keep_steps)
        return self.calibrator

    def _keep_steps(self, limits: EngineLimits, columns: StepColumns) -> None:
        """Put steps on disk: another tool, or a later one, may learn more from them."""
        for row in packed([(limits, columns)]):
            self.context.run_dir.add_line(STEPS_FILE, row)

    def take_over(self, stored: Profile, started: EngineStart) -> Profile:
        """Return a profile of before for the engine at hand, whose steps may yet correct it.

        Raises: ShadowError if nothing can be predicted of such an engine.
        """
        begun = self.begin(started, stored).calibration
        profile = replace(
            stored,
            shape=begun.shape,
            kv_starts=begun.starts,
            current_limits=begun.current,
            serve_values=begun.serve_values,
        )
        self.keep(profile)
        return profile

    def keep(self, profile: Profile) -> None:
        """Put the profile on disk, with what is doubtful of replays on its engine."""
        caveats = tuple(one for one in OF_THE_ENGINE if one in self.context.caveats)
        path = self.context.run_dir.path / PROFILE_FILE
        write_profile(path, replace(profile, caveats=caveats))

    def fitted(
        self, given: Profile | None = None, agreement: Agreement | None = None
    ) -> Profile:
        """Return the profile that the steps so far make, or the given one corrected by them.

        Raises: TooFewSamplesError with too few steps.
        """
        calibrator = self.begun
        with self.context.stopwatch.stage("fit"):
            if given is not None:
                profile = calibrator.calibration.corrected(given)
            else:
                profile = calibrator.profile()
            profile = replace(profile, agreement=agreement or profile.agreement)
            self.keep(profile)
        wrong = self.predictor_of(profile).wrong_ratio
        brings = self._tell_drafts(profile)
        self.context.listener.note(
            f"step model from {profile.fit.steps} steps, wrong by {wrong:.1%}{brings}"
        )
        stretched = 0.0
        if given is None:
            stretched = calibrator.calibration.stretched_ratio(profile)
        if stretched > STRETCHED:
            self.context.caveats.add(Caveat.STEPS_STRETCHED)
            self.context.listener.note(
                f"the machine stretched steps, which made all of them {stretched:.0%} longer"
            )
        return profile

    def _tell_drafts(self, profile: Profile) -> str:
        """Say what drafts bring, and where other ones are accepted here than are predicted."""
        if not profile.accepted:
            return ""
        random_text, seen = Caveat.DRAFTS_ON_RANDOM_TEXT, self.begun.calibration.accepted
        brings = f"; {drafts_words(profile.accepted)}"
        context, text = self.context, f"{random_text.text}{brings}"
        if seen and abs(sum(seen) - sum(profile.accepted)) > APART * (1 + sum(seen)):
            context.caveats.add(random_text)
            text = (
                "what raced is of other text than what is predicted: by the profile "
                f"{drafts_words(profile.accepted)}, and here {drafts_words(seen)}; --method "
                "shadow predicts alone"
            )
        if random_text in context.caveats:
            context.caveat_texts[random_text] = text
        return brings

    def restlessness(self, decision: RaceDecision) -> Restlessness | None:
        """Return how restless the machine was, None where nothing was learnt of it."""
        if self.calibrator is None or self.calibrator.mood is None:
            return None
        taken_s, odds = self.context.stopwatch.stages_s, decision.odds
        is_change = decision.verdict is RaceVerdict.CHANGE
        return Restlessness.of(
            math.expm1(self.calibrator.mood.between_moments),
            None if odds is None else odds.open_ratio,
            sum(taken_s.get(name, 0.0) for name in ("calibrate", "race")),
            is_sure=is_change or (odds is not None and odds.loss <= TIE_LOSS),
        )

    def compared(self, profile: Profile) -> Profile:
        """Return the profile with how the simulator compares with the engine's scheduler."""
        context, predictor = self.context, self.predictor_of(profile)
        if predictor.doubt:
            return profile
        workload, space = Workload.of_whole(context.trace, context.aim), context.space
        piece = busiest(workload.pieces[0], COMPARED_S).of(workload.pieces[0])
        found = []
        # The current limits, and the largest, where other things bind.
        for limits in dict.fromkeys((space.current, space.ceiling)):
            engine = predictor.simulated(limits)
            parts = (engine.shape, engine.ceiling, engine.num_blocks, engine.step_model)
            given = (*parts, piece, limits, workload.plan, REPLAY_S, engine.accepted)
            reference = self.runner.engine.process.call(replay_reference, *given)
            if reference is None:
                return profile
            found.append(compare(engine, piece, limits, workload.plan, reference))
        agreement = together(found)
        profile = replace(profile, agreement=agreement)
        self.keep(profile)
        context.listener.note(
            f"vLLM decides otherwise than the simulator, {agreement.departs}: it is asked"
            if agreement.departs
            else f"simulator and vLLM's scheduler agree on {agreement.steps} steps"
        )
        return profile

    def observer(self, started: EngineStart) -> Observe | None:
        """Return what receives a live search's steps, None where nothing can be predicted."""
        try:
            calibrator = self.calibrator or self.begin(started)
        except ShadowError as reason:
            self.context.listener.note(f"no profile is kept: {reason.message}")
            return None
        return calibrator.observe

    def profile_of_search(self) -> Profile | None:
        """Write what a live search has shown, if it is enough for a profile, and return it."""
        path = self.context.run_dir.path / PROFILE_FILE
        is_unfit = Caveat.SHADOW_UNFIT in self.context.caveats
        if self.calibrator is None or (path.exists() and not is_unfit):
            return None
        try:
            profile = self.calibrator.profile()
        except TooFewSamplesError as reason:
            self.context.listener.note(f"no profile is kept: {reason.message}")
            return None
        self.keep(profile)
        return profile

    def keep_starts(self) -> None:
        """Keep in the profile how many blocks the cold engines had."""
        path = self.context.run_dir.path / PROFILE_FILE
        blocks = self.runner.engine.cold_blocks
        if self.calibrator is None or not blocks or not path.exists():
            return
        for limits, num_blocks in blocks.items():
            calibration = self.calibrator.calibration.and_start(limits, num_blocks)
            self.calibrator.calibration = calibration
        self.keep(replace(read_profile(path), kv_starts=self.calibrator.calibration.starts))
