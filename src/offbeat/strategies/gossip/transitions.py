"""The table of transitions of a peer: phase × trigger → phase and handlers.

Columns are the phases in order. An entry is a handler, or a tuple of handlers, which leaves the phase as it is; `enter`
with another phase; `_`, ignored; or `X`, an internal error. Every change of phase is in this table. A message that is
ignored has done its work when its sample counts were merged, or has come too late. Handlers are methods of the parts:

    a  exchanges      t  training       r  rounds of global averages
    m  membership     v  evaluations    e  the end of the run
"""

from __future__ import annotations

from types import FunctionType

from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.gossip.averaging import Averaging
from offbeat.strategies.gossip.global_averages import GlobalAverages
from offbeat.strategies.gossip.peer_membership import PeerMembership
from offbeat.strategies.gossip.peer_training import PeerTraining
from offbeat.strategies.gossip.phases import Handler, Phase, Transition, Trigger, Unhandled
from offbeat.strategies.gossip.termination import Termination
from offbeat.strategies.node_state import Stateful

Entry = Transition | Unhandled
Cell = Handler | tuple[Handler, ...] | Transition | Unhandled


def enter(phase: Phase, *handlers: Handler) -> Transition:
    """A change to another phase, in which the handlers are called."""
    return Transition(phase, handlers)


def _entry(phase: Phase, cell: Cell) -> Entry:
    """An entry of the table; a cell that names no phase stays in that of its column."""
    if isinstance(cell, Transition | Unhandled):
        return cell
    return Transition(phase, cell if isinstance(cell, tuple) else (cell,))


_, X = Unhandled.IGNORED, Unhandled.IMPOSSIBLE
T = Trigger
a, t, r, e, m, v = Averaging, PeerTraining, GlobalAverages, Termination, PeerMembership, Evaluations

clear = (m.clear_links, a.clear_links, t.clear_links, r.clear_links, e.clear_links)
gather, resume, relink = (*clear, m.gather), (*clear, t.resume), (*clear, e.await_links)
reply = (a.on_reply, t.check_idle)
last_evaluated = (v.report, e.finish_if_done)
waiting_too, first_round = (m.note_start, r.resend_start), (m.note_start, r.join_round)
forget = (a.rank_lost, r.rank_lost, e.rank_lost)
removed_early, removed = (*forget, m.copy_source_lost, m.after_loss), (*forget, m.after_loss)
new_root = (m.set_root, r.abandon, e.root_changed, a.root_changed)
contribute, give_up = r.contribute_if_due, t.give_up_computation
begin = enter(Phase.TRAINING, r.abandon, m.begin, a.begin, t.begin, m.send_member_list, t.train)
late = enter(Phase.ENDING, r.mark_late, r.start_final)
late_round = enter(Phase.ENDING, r.mark_late, r.join_round)
last_round = enter(Phase.ENDING, t.stop, r.join_round)
last_average = enter(Phase.ENDING, t.stop, r.apply)
end = enter(Phase.ENDING, t.stop, e.finalize)
hold = enter(Phase.COMPLETE, e.hold)
left, failed, done = (enter(Phase.FINISHED, finish) for finish in (t.finish, t.fail, e.finish))

# fmt: off
_ROWS: dict[Trigger, tuple[Cell, Cell, Cell, Cell, Cell]] = {
    # events             GATHERING            TRAINING             ENDING               COMPLETE          FINISHED
    T.STARTED:          (gather,              resume,              relink,              relink,              _),
    T.COMPUTED:         (X,                   t.computed,          t.drop_computed,     t.drop_computed,     _),
    T.EXCHANGE_TIMER:   (_,                   a.on_timer,          _,                   _,                   _),
    T.GATHER_TIMER:     (m.gather_timeout,    _,                   _,                   _,                   _),
    T.LINKS_TIMER:      (e.links_timeout,     e.forget_links,      e.links_timeout,     e.links_timeout,     _),
    T.UNTIL_TIMER:      (_,                   t.end,               _,                   _,                   _),
    T.HANG_TIMER:       (_,                   _,                   give_up,             give_up,             _),
    T.EVALUATED:        (X,                   v.report,            v.report,            last_evaluated,      _),
    T.PEER_JOINED:      (m.joined,            m.joined_later,      m.joined_later,      m.joined_later,      _),
    T.PEER_LOST:        (m.lost,              m.lost,              m.lost,              m.lost_at_end,       _),
    T.LEAVE:            (t.leave_early,       t.leave,             _,                   _,                   _),
    # messages           GATHERING            TRAINING             ENDING               COMPLETE          FINISHED
    T.OFFER:            (a.on_offer,          a.on_offer,          a.on_offer,          a.on_offer,          _),
    T.REPLY:            (reply,               reply,               reply,               reply,               _),
    T.READY:            (a.on_ready,          a.on_ready,          a.on_ready,          a.on_ready,          _),
    T.PAIRED:           (a.on_paired,         a.on_paired,         a.on_paired,         a.on_paired,         _),
    T.REDUCE_START:     (r.on_reduce_start,   r.on_reduce_start,   r.on_reduce_start,   r.on_reduce_start,   _),
    T.PARTIAL_SUM:      (r.on_partial_sum,    r.on_partial_sum,    r.on_partial_sum,    r.on_partial_sum,    _),
    T.FIRST_AVERAGE:    (r.apply,             _,                   _,                   _,                   _),
    T.FINAL_AVERAGE:    (r.apply,             last_average,        r.apply,             r.apply,             _),
    T.AVERAGE_RECEIVED: (_,                   _,                   _,                   e.on_received,       _),
    T.REDUCE_RETRY:     (r.repeat,            m.send_status,       r.repeat,            e.repeat_result,     _),
    T.STATUS_WAITING:   (waiting_too,         m.send_status,       r.resend_start,      r.resend_start,      _),
    T.STATUS_TRAINING:  (m.add_copy_source,   _,                   _,                   _,                   _),
    T.COPY_REQUEST:     (_,                   t.send_copy,         _,                   _,                   _),
    T.COPY_REPLY:       (t.take_copy,         _,                   _,                   _,                   _),
    T.GOAL_REACHED:     (e.require_links,     t.end,               r.resend_start,      e.on_goal_reached,   _),
    T.LOOP_ENDED:       (e.on_loop_ended,     e.on_loop_ended,     e.on_loop_ended,     e.on_loop_ended,     _),
    T.MEMBER_LIST:      (m.on_member_list,    m.on_member_list,    m.on_member_list,    m.on_member_list,    _),
    T.SAMPLE_COUNTS:    (_,                   _,                   _,                   _,                   _),
    T.STOP:             (_,                   _,                   _,                   e.on_stop,           _),
    T.STOPPED:          (_,                   _,                   _,                   e.on_stopped,        _),
    # signals            GATHERING            TRAINING             ENDING               COMPLETE          FINISHED
    T.REQUIRED_LINK_UP: (e.start_if_linked,   _,                   e.start_if_linked,   e.start_if_linked,   X),
    T.RANK_ADDED:       (m.start_if_ready,    m.send_member_list,  e.repeat_final,      e.rank_added,        X),
    T.RANK_REMOVED:     (removed_early,       removed,             removed,             removed,             X),
    T.ROOT_CHANGED:    ((*new_root, m.greet_root),
                        (*new_root, t.repeat_loop_end, m.update_root, m.report_unreachable),
                        (*new_root, e.finalize),
                        (*new_root, e.finalize),                                                             X),
    T.ROOT_KEPT:       ((r.request_retry, r.abandon_as_root, m.start_if_ready),
                        (m.send_member_list, e.end_if_all_loops_ended),
                        (r.request_retry, r.repeat_as_root),
                        (r.request_retry, e.resend_results),                                                 X),
    T.LOSS_HANDLED:     (t.check_idle,
                        (m.report_unreachable, t.check_idle),
                         t.check_idle,
                        (t.check_idle, e.finish_if_done),                                                    _),
    T.FIRST_DUE:        (r.start_first,       X,                   X,                   X,                   X),
    T.FINAL_DUE:        (late,                X,                   r.start_final,       r.start_final,       X),
    T.FIRST_ROUND:      (first_round,         m.tell_root,         e.ask_root,          e.ask_root,          X),
    T.FINAL_ROUND:      (late_round,          last_round,          r.join_round,        r.join_round,        X),
    T.BEGIN:            (begin,               X,                   X,                   X,                   X),
    T.GOAL:             (_,                   t.end,               _,                   _,                   X),
    T.END:              (X,                   end,                 X,                   X,                   X),
    T.OWN_LOOP_ENDED:   (X,                   e.announce_loop_end, X,                   X,                   X),
    T.IDLE:             (contribute,          _,                   contribute, (contribute, e.send_receipt), X),
    T.RESULT:           (hold,                X,                   hold,                e.hold,              X),
    T.LEFT:             (left,                left,                left,                left,                X),
    T.DONE:             (X,                   X,                   X,                   done,                _),
    T.FAILED:           (failed,              failed,              failed,              X,                   X),
}
# fmt: on

TRANSITIONS: dict[Trigger, dict[Phase, Entry]] = {
    trigger: {phase: _entry(phase, cell) for phase, cell in zip(Phase, row, strict=True)}
    for trigger, row in _ROWS.items()
}

HANDLER_PARTS: dict[Handler, type[Stateful]] = {
    method: part for part in (a, t, r, e, m, v) for method in vars(part).values() if isinstance(method, FunctionType)
}
"""Handler → the part that it is a method of."""
