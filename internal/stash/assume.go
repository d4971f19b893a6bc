// This file owns assumed rows: on a device that executes no kernels, the report of a step
// contains the rows that Config.Assume returns.

package stash

import "github.com/stowage-dev/stowage/internal/schedule"

// assumption holds what the kernels of a step would report, as far as the sizes of pools
// and sets depend on it.
type assumption struct {
	need map[int]schedule.Pages // by record
	over *Record                // a record whose rows do not fit its set, or nil
	rows Rows                   // the rows of over
	most Rows                   // that fit the first of its tensors that is too small
}

// assume notes the pages that a stash takes.
func (st *Store) assume(r *Record) {
	if st.cfg.Assume == nil {
		return
	}
	st.noteAssumed(r)
	rows := make([]Rows, r.layout.counts)
	for i := range rows {
		rows[i] = st.cfg.Assume(r.group)
	}
	if st.assumed.need == nil {
		st.assumed.need = map[int]schedule.Pages{}
	}
	st.assumed.need[r.id] = r.layout.Pages(st.cfg.Page, rows...)
}

// noteAssumed notes a set that is over capacity: it would receive more rows than fit.
func (st *Store) noteAssumed(r *Record) {
	if st.cfg.Assume == nil {
		return
	}
	rows := st.cfg.Assume(r.group)
	for _, t := range r.layout.Tensors {
		if rows > t.MaxRows && rows > st.assumed.rows {
			st.assumed.over, st.assumed.rows, st.assumed.most = r, rows, t.MaxRows
		}
	}
}

// report writes the assumption into a report.
func (a *assumption) report(r *Report) {
	for i := range r.Need {
		r.Need[i] = a.need[i]
	}
	if a.over != nil {
		r.OverCapacity, r.OverID, r.OverRows, r.OverLimit = 1, uint64(a.over.id), uint64(a.rows), uint64(a.most)
	}
}
