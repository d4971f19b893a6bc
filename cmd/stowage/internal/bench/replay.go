// This file owns the replay of routing traces: what a step's live rows take at
// the worst moment, by the trace and the schedule alone, beside what the stash
// took for them.

package bench

import (
	"cmp"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/routing"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
)

// ReplayOptions say what to replay.
type ReplayOptions struct {
	Trace *routing.Trace
	Ranks []int // the expert ranks to replay, one after the other
	// Pipeline is the shape of the pipeline and Stage the rank in it. The
	// trace's layers are spread over its chunks as a model's are: chunk 0 of
	// every stage, then chunk 1 of every stage, and so on.
	Pipeline schedule.Pipeline
	Stage    int
	Tensors  int          // of each group, which share the width
	Width    device.Bytes // bytes of a row
	Page     device.Bytes
	Sets     int        // of worst-case buffers
	MaxRows  stash.Rows // that sets begin with; they grow to the worst case
	Pool     device.Bytes
}

// Check tells whether the options fit together.
func (o ReplayOptions) Check() error {
	t := o.Trace
	if o.Pipeline.Microbatches != t.Microbatches {
		return fmt.Errorf("a pipeline of %d microbatches for a trace of %d", o.Pipeline.Microbatches, t.Microbatches)
	}
	if _, err := o.Pipeline.Passes(o.Stage); err != nil {
		return err
	}
	if stages := o.Pipeline.Ranks * o.Pipeline.Chunks; t.Layers%stages != 0 {
		return fmt.Errorf("%d layers do not divide over %d pipeline ranks of %d chunks", t.Layers, o.Pipeline.Ranks, o.Pipeline.Chunks)
	}
	for _, r := range o.Ranks {
		if r < 0 || r >= t.Ranks {
			return fmt.Errorf("expert rank %d of a trace of %d ranks", r, t.Ranks)
		}
	}
	return nil
}

// ReplayFigures are those of one rank, or of all together. Bytes are the most of
// any step.
type ReplayFigures struct {
	Live device.Bytes `json:"live_bytes"` // the live rows at the worst moment, exactly
	// Stored are those of them that must be in pages, exactly: once the schedule
	// is known, a group whose backward pass comes next stays in its set.
	Stored    device.Bytes `json:"stored_bytes"`
	Bound     device.Bytes `json:"bound_bytes"` // the most of stored bytes and a page for each of their tensors
	Pool      device.Bytes `json:"pool_bytes"`  // what the pools have grown to
	Host      device.Bytes `json:"host_bytes"`  // the part of it in host memory
	OverLive  float64      `json:"pool_over_live"`
	OverBound float64      `json:"pool_over_bound"`
	// Static is what it takes to give every layer and microbatch in flight
	// buffers for the worst case; Sets are the stash's own worst-case buffers.
	Static  device.Bytes `json:"static_bytes"`
	Sets    device.Bytes `json:"set_bytes"`
	Reruns  int          `json:"reruns"`
	Growths int          `json:"growths"`
	Spilled device.Bytes `json:"spilled_bytes"`
	Stashed device.Bytes `json:"stashed_bytes"`
	// Dropped are rows that were not there for the backward pass, Wrong the
	// tensors whose checksum was not that of the forward pass. Both must be zero.
	Dropped routing.Rows `json:"dropped_rows"`
	Wrong   int          `json:"wrong_tensors"`
}

// ReplayRank is one expert rank. Imbalance is its largest number of rows over
// the balanced one.
type ReplayRank struct {
	Rank      int     `json:"rank"`
	Imbalance float64 `json:"imbalance"`
	ReplayFigures
}

// Replay is the result.
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
	Width        device.Bytes `json:"width_bytes"`
	Page         device.Bytes `json:"page_bytes"`
	Ranks        []ReplayRank `json:"ranks"`
	// Total adds up the ranks; its ratios are the largest of any rank, and
	// StepsRerun the steps that at least one rank made all of them run again.
	Total      ReplayFigures `json:"total"`
	StepsRerun int           `json:"steps_rerun"`
}

// Replays replays a trace on a device; done is called after each rank.
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
	// The same plan as the manager's: one pool of sets, one of them always free.
	plan := r.sched.Plan(replayAhead, func(schedule.Group) (pool, room int) { return 0, o.Sets - 1 })
	for step := range o.Trace.Steps() {
		rows := func(g schedule.Group) routing.Rows { return o.rows(step, rank, g) }
		live, bound := o.live(r.sched, rows)
		f.Live = max(f.Live, live)
		stored := live
		if step > 0 { // the first one records the schedule
			stored, bound = o.live(r.sched, func(g schedule.Group) routing.Rows {
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
	f.Spilled, f.Stashed = device.Bytes(st.Spilled)*o.Page, device.Bytes(st.Stashed)*o.Page
	f.Host = device.Bytes(r.m.Store().Pages(stash.Host)) * o.Page
	f.Pool = device.Bytes(r.m.Store().Pages(stash.Device))*o.Page + f.Host
	if f.Stored > 0 {
		f.OverLive, f.OverBound = float64(f.Pool)/float64(f.Live), float64(f.Pool)/float64(f.Bound)
	}
	f.Static, _ = o.live(r.sched, func(schedule.Group) routing.Rows { return o.Trace.Worst() })
	f.Sets = r.setBytes
	return res, nil
}

// Footprint is the memory that a replay takes at least, besides the pages.
func (o ReplayOptions) Footprint() device.Bytes {
	tensor := device.Bytes(o.Trace.Worst()) * o.Width
	return tensor + min(tensor, device.Bytes(o.MaxRows)*o.Width)*device.Bytes(o.Tensors*o.Sets)
}

// layers are those of one chunk.
func (o ReplayOptions) layers() int { return o.Trace.Layers / (o.Pipeline.Ranks * o.Pipeline.Chunks) }

// rows are those of a group in the trace.
func (o ReplayOptions) rows(step, rank int, g schedule.Group) routing.Rows {
	layer := (g.Chunk*o.Pipeline.Ranks+o.Stage)*o.layers() + g.Layer
	return o.Trace.Rows(step, layer, g.Microbatch, rank)
}

// live is what the rows of all groups between their save and their load take at
// the worst moment of a step; bound is the same with one page more for each
// tensor that has rows.
func (o ReplayOptions) live(s *schedule.Schedule, rows func(schedule.Group) routing.Rows) (live, bound device.Bytes) {
	var bytes, pages device.Bytes
	for i := range s.Len() {
		e := s.At(i)
		n := device.Bytes(rows(e.Group))
		if n == 0 {
			continue
		}
		tensors := device.Bytes(o.Tensors)
		if e.Load {
			tensors = -tensors
		}
		bytes += tensors * n * o.Width
		pages += tensors * o.Page
		live, bound = max(live, bytes), max(bound, bytes+pages)
	}
	return live, bound
}
