// This file owns tables of what is said of a value whose numbers are changed one by one.

package golden

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
)

// Vary changes the numbers and flags of a value one by one and returns a table of what say
// says of each. Whole numbers are tried round those of limits too, by the last part of their
// names. Fields whose names keep refuses stay as they are, and pointers to nothing are set to
// an empty struct. fresh must return a value that shares nothing that is changed.
func Vary[T any](fresh func() *T, keep func(name string) bool, limits map[string][]int, say func(*T) string) string {
	var names []string
	kinds := map[string]reflect.Value{}
	leaves("", reflect.ValueOf(fresh()), func(name string, v reflect.Value) {
		if keep(name) {
			names, kinds[name] = append(names, name), v
		}
	})
	var b strings.Builder
	for _, name := range names {
		said, order := map[string][]string{}, []string(nil)
		for _, value := range tries(kinds[name], limits[name[strings.LastIndexByte(name, '.')+1:]]) {
			x := fresh()
			leaves("", reflect.ValueOf(x), func(n string, v reflect.Value) {
				if n == name {
					v.Set(value.Convert(v.Type()))
				}
			})
			what := spoken(x, say)
			if !slices.Contains(order, what) {
				order = append(order, what)
			}
			word := fmt.Sprint(value)
			if value.Kind() == reflect.Pointer {
				word = "empty"
			}
			said[what] = append(said[what], word)
		}
		for _, what := range order {
			fmt.Fprintf(&b, "  %s = %s: %s\n", name, strings.Join(said[what], ", "), what)
		}
	}
	return b.String()
}

// spoken returns what say says, or the panic.
func spoken[T any](x *T, say func(*T) string) (said string) {
	defer func() {
		if p := recover(); p != nil {
			said = fmt.Sprint("panic: ", p)
		}
	}()
	return say(x)
}

// leaves calls f for each number, flag and empty pointer below a value.
func leaves(name string, v reflect.Value, f func(name string, v reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			leaves(name, v.Elem(), f)
		} else if v.CanSet() && v.Type().Elem().Kind() == reflect.Struct {
			f(name, v)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.IsExported() {
				leaves(strings.TrimPrefix(name+"."+field.Name, "."), v.Field(i), f)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if v.Index(i).Kind() == reflect.Struct {
				leaves(fmt.Sprintf("%s[%d]", name, i), v.Index(i), f)
			}
		}
	case reflect.Int, reflect.Int64, reflect.Uint8, reflect.Float32, reflect.Float64, reflect.Bool:
		f(name, v)
	}
}

// tries returns the values that are tried in place of one.
func tries(v reflect.Value, limits []int) (values []reflect.Value) {
	add := func(more ...any) {
		for _, x := range more {
			values = append(values, reflect.ValueOf(x))
		}
	}
	switch v.Kind() {
	case reflect.Pointer:
		return []reflect.Value{reflect.New(v.Type().Elem())}
	case reflect.Bool:
		add(!v.Bool())
	case reflect.Float32, reflect.Float64:
		add(-1.0, math.Copysign(0, -1), 1.0, 1.5, 1e6, 1.0000001e6, float64(math.MaxFloat32), 3.5e38, math.NaN(), math.Inf(1))
	case reflect.Uint8:
		add(0, 1, 2, 3)
	default:
		add(-1, 0, 1, 2, 3, 4, 5, 255, 256, 1025)
		for _, most := range limits {
			add(most-1, most, most+1)
		}
	}
	return values
}
