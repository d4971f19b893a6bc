// This file owns the replay of routing counts: the memory of a step's live rows at the
// worst moment, computed from the counts and the schedule, beside what the stash used for
// them.

package bench

import (
	"cmp"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/routing"
)

// ReplayOptions says what to replay.
type ReplayOptions struct {
	Trace *routing.Counts
	Ranks []int // the expert ranks to replay, one after the other
	// Pipeline is the shape of the pipeline, and Stage is the rank in it. The layers of the
	// counts are spread over its chunks like a model's: chunk 0 of every stage, then chunk
	// 1 of every stage, and so on.
	Pipeline schedule.Pipeline
	Stage    int
	Tensors  int          // of each group, which share the width
	Width    memory.Bytes // bytes of a row
	Page     memory.Bytes
	Sets     int        // of worst-case buffers
	MaxRows  stash.Rows // that sets begin with; they grow to the worst case
	Pool     memory.Bytes
}

// Check returns an error if the options do not fit together.
func (o ReplayOptions) Check() error {
	t := o.Trace
	if o.Pipeline.Microbatches != t.Microbatches {
		return fmt.Errorf("expected a pipeline of %d microbatches, as in the routing counts, got %d", t.Microbatches, o.Pipeline.Microbatches)
	}
	if o.Stage < 0 || o.Stage >= o.Pipeline.Ranks {
		return &memory.SettingError{Setting: "Stage", Asked: fmt.Sprint(o.Stage), Problem: "is out of range", Remedy: fmt.Sprintf("give a rank from 0 to %d", o.Pipeline.Ranks-1)}
	}
	if o.Pipeline.Chunks > 1 && o.Pipeline.Ranks == 1 {
		return &memory.SettingError{Setting: "VPP", Asked: fmt.Sprint(o.Pipeline.Chunks), Problem: "interleaves chunks, which needs at least two pipeline ranks", Remedy: "use more pipeline ranks, or one chunk"}
	}
	if _, err := o.Pipeline.Passes(o.Stage); err != nil {
		return err
	}
	if stages := o.Pipeline.Ranks * o.Pipeline.Chunks; t.Layers%stages != 0 {
		return &memory.SettingError{Setting: "PP", Asked: fmt.Sprint(o.Pipeline.Ranks), Problem: fmt.Sprintf("does not divide %d layers into stages of %d chunks", t.Layers, o.Pipeline.Chunks), Remedy: "choose one that does"}
	}
	for _, r := range o.Ranks {
		if r < 0 || r >= t.Ranks {
			return &memory.SettingError{Setting: "Rank", Asked: fmt.Sprint(r), Problem: "is out of range", Remedy: fmt.Sprintf("give an expert rank from 0 to %d", t.Ranks-1)}
		}
	}
	return nil
}

// ReplayFigures has the figures of one rank, or of all ranks together. Bytes are the most
// of any step.
type ReplayFigures struct {
	Live memory.Bytes `json:"live_bytes"` // the live rows at the worst moment, exactly
	// Stored is the exact size of the live rows that must be in pages. Once the schedule is
	// known, a group stays in its set if its backward pass comes next.
	Stored    memory.Bytes `json:"stored_bytes"`
	Bound     memory.Bytes `json:"bound_bytes"` // the most of stored bytes and a page for each of their tensors
	Pool      memory.Bytes `json:"pool_bytes"`  // what the pools have grown to
	Host      memory.Bytes `json:"host_bytes"`  // the part of it in host memory
	OverLive  float64      `json:"pool_over_live"`
	OverBound float64      `json:"pool_over_bound"`
	// Static is the memory that gives every layer and microbatch in flight buffers for the
	// worst case. Sets is the size of the stash's own worst-case buffers.
	Static  memory.Bytes `json:"static_bytes"`
	Sets    memory.Bytes `json:"set_bytes"`
	Reruns  int          `json:"reruns"`
	Growths int          `json:"growths"`
	Spilled memory.Bytes `json:"spilled_bytes"`
	Stashed memory.Bytes `json:"stashed_bytes"`
	// Dropped counts rows that were missing in the backward pass, and Wrong counts tensors
	// with another checksum than in the forward pass. Both must be zero.
	Dropped routing.Rows `json:"dropped_rows"`
	Wrong   int          `json:"wrong_tensors"`
}

// Fault returns an error if rows were lost or changed.
func (f *ReplayFigures) Fault() error {
	if f.Dropped == 0 && f.Wrong == 0 {
		return nil
	}
	return fmt.Errorf("%d rows were lost and %d tensors came back changed; this is a bug; report it with the command", f.Dropped, f.Wrong)
}

// ReplayRank has the figures of one expert rank. Imbalance is its largest number of rows
// over the balanced number.
type ReplayRank struct {
	Rank      int     `json:"rank"`
	Imbalance float64 `json:"imbalance"`
	ReplayFigures
}

// Replay is the result of a replay.
type Replay struct {
	Device       device.Info  `json:"device"`
	Steps        int          `json:"steps"`
	Layers       int          `json:"layers"` // of this stage
	Microbatches int          `json:"microbatches"`
	Balanced     routing.Rows `json:"balanced_rows"`
	Worst        routing.Rows `json:"worst_rows"`
	PP           int          `json:"pp"`
	VPP          int          `json:"vpp"`
	Stage        int          `json:"stage"`
	Tensors      int          `json:"tensors"`
	Width        memory.Bytes `json:"width_bytes"`
	Page         memory.Bytes `json:"page_bytes"`
	Ranks        []ReplayRank `json:"ranks"`
	// Total adds up the ranks. Its ratios are the largest of any rank, and StepsRerun
	// counts the steps that at least one rank made all of them rerun.
	Total      ReplayFigures `json:"total"`
	StepsRerun int           `json:"steps_rerun"`
}

// Replays replays routing counts on a device. It calls done after each rank.
func Replays(dev device.Device, o ReplayOptions, done func(*Replay, ReplayRank) error) (res Replay, err error) {
	if err := o.Check(); err != nil {
		return res, err
	}
	res = Replay{
		Device: dev.Info(), Steps: o.Trace.Steps(), Layers: o.layers() * o.Pipeline.Chunks, Microbatches: o.Trace.Microbatches,
		Balanced: o.Trace.Balanced(), Worst: o.Trace.Worst(), PP: o.Pipeline.Ranks, VPP: o.Pipeline.Chunks, Stage: o.Stage,
		Tensors: o.Tensors, Width: o.Width, Page: o.Page,
	}
	rerun := map[int]bool{}
	for _, rank := range o.Ranks {
		r, err := o.replay(dev, rank, rerun)
		if err != nil {
			return res, fmt.Errorf("expert rank %d: %w", rank, err)
		}
		res.Ranks = append(res.Ranks, r)
		res.Total.add(r.ReplayFigures)
		res.StepsRerun = len(rerun)
		if err := done(&res, r); err != nil {
			return res, err
		}
	}
	return res, nil
}

func (f *ReplayFigures) add(g ReplayFigures) {
	f.Live += g.Live
	f.Stored += g.Stored
	f.Bound += g.Bound
	f.Pool += g.Pool
	f.Host += g.Host
	f.OverLive = max(f.OverLive, g.OverLive)
	f.OverBound = max(f.OverBound, g.OverBound)
	f.Static += g.Static
	f.Sets += g.Sets
	f.Reruns += g.Reruns
	f.Growths += g.Growths
	f.Spilled += g.Spilled
	f.Stashed += g.Stashed
	f.Dropped += g.Dropped
	f.Wrong += g.Wrong
}

// replay replays one expert rank.
func (o ReplayOptions) replay(dev device.Device, rank int, rerun map[int]bool) (res ReplayRank, err error) {
	r, err := newReplayRig(dev, o, rank)
	if err != nil {
		return res, err
	}
	defer func() { err = cmp.Or(err, r.close()) }()
	f := &res.ReplayFigures
	res.Rank = rank
	// This is the manager's plan: one pool of sets, of which one is always free.
	plan := r.sched.Moves(replayAhead, func(memory.GroupID) (pool, room int) { return 0, o.Sets - 1 })
	for step := range o.Trace.Steps() {
		rows := func(g memory.GroupID) routing.Rows { return o.rows(step, rank, g) }
		live, bound := o.live(r.sched, rows)
		f.Live = max(f.Live, live)
		stored := live
		if step > 0 { // the first one records the schedule
			stored, bound = o.live(r.sched, func(g memory.GroupID) routing.Rows {
				if plan.Keep[g] {
					return 0
				}
				return rows(g)
			})
		}
		f.Stored, f.Bound = max(f.Stored, stored), max(f.Bound, bound)
		for g := range r.place {
			res.Imbalance = max(res.Imbalance, float64(rows(g))/float64(o.Trace.Balanced()))
		}
		before := r.m.Stats().Reruns
		if err := r.step(step, f); err != nil {
			return res, fmt.Errorf("step %d: %w", step, err)
		}
		if r.m.Stats().Reruns > before {
			rerun[step] = true
		}
	}
	st := r.m.Stats()
	f.Reruns, f.Growths = st.Reruns, st.Growths
	f.Spilled, f.Stashed = memory.Bytes(st.Spilled)*o.Page, memory.Bytes(st.Stashed)*o.Page
	f.Host = memory.Bytes(r.m.Store().Pages(stash.Host)) * o.Page
	f.Pool = memory.Bytes(r.m.Store().Pages(stash.Device))*o.Page + f.Host
	if f.Stored > 0 {
		f.OverLive, f.OverBound = float64(f.Pool)/float64(f.Live), float64(f.Pool)/float64(f.Bound)
	}
	f.Static, _ = o.live(r.sched, func(memory.GroupID) routing.Rows { return o.Trace.Worst() })
	f.Sets = r.setBytes
	return res, nil
}

// Footprint returns the least memory of a replay, without the pages.
func (o ReplayOptions) Footprint() memory.Bytes {
	tensor := memory.Bytes(o.Trace.Worst()) * o.Width
	return tensor + min(tensor, memory.Bytes(o.MaxRows)*o.Width)*memory.Bytes(o.Tensors*o.Sets)
}

// layers returns the layers of one chunk.
func (o ReplayOptions) layers() int { return o.Trace.Layers / (o.Pipeline.Ranks * o.Pipeline.Chunks) }

// rows returns the rows of a group in the routing counts.
func (o ReplayOptions) rows(step, rank int, g memory.GroupID) routing.Rows {
	layer := (g.Chunk*o.Pipeline.Ranks+o.Stage)*o.layers() + g.Layer
	return o.Trace.Rows(step, layer, g.Microbatch, rank)
}

// live returns the size of the rows of all groups between their save and their load, at the
// worst moment of a step. bound is the same with one more page for each tensor that has
// rows.
func (o ReplayOptions) live(s *schedule.Schedule, rows func(memory.GroupID) routing.Rows) (live, bound memory.Bytes) {
	var bytes, pages memory.Bytes
	for i := range s.Len() {
		e := s.At(i)
		n := memory.Bytes(rows(e.Group))
		if n == 0 {
			continue
		}
		tensors := memory.Bytes(o.Tensors)
		if e.Load {
			tensors = -tensors
		}
		bytes += tensors * n * o.Width
		pages += tensors * o.Page
		live, bound = max(live, bytes), max(bound, bytes+pages)
	}
	return live, bound
}
