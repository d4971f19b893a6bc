// This file owns rows that nobody counts: on a device that executes nothing a step's
// report says what was assumed.

package stash

import "github.com/stowage-dev/stowage/schedule"

// assumption is what the kernels of a step would have found, as far as the sizes of
// pools and sets follow from it.
type assumption struct {
	need map[int]schedule.Pages // by record
	over *Record                // whose rows do not fit its set, or nil
	rows Rows                   // of that
}

// assume notes what a stash takes.
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

// noteAssumed notes a set that would have received more rows than fit.
func (st *Store) noteAssumed(r *Record) {
	if st.cfg.Assume == nil {
		return
	}
	rows := st.cfg.Assume(r.group)
	for _, t := range r.layout.Tensors {
		if rows > t.MaxRows && rows > st.assumed.rows {
			st.assumed.over, st.assumed.rows = r, rows
		}
	}
}

// report puts it where the host looks.
func (a *assumption) report(r *Report) {
	for i := range r.Need {
		r.Need[i] = a.need[i]
	}
	if a.over != nil {
		r.OverBudget, r.OverID, r.OverRows = 1, uint64(a.over.id), uint64(a.rows)
		r.OverLimit = uint64(a.over.layout.Tensors[0].MaxRows)
	}
}
